"""Benchmarks behind `diptych bench`: workloads, what is measured, and how it is shown. No part of serving."""
