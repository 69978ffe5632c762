"""CPU kernels: C++ in `csrc`, built at first use, called through ctypes; one thin module a kernel family.

Device side. Knows tensors, not layers or models; every family has a torch reference elsewhere that it must agree with.
"""
