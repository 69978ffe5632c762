"""Layers that models are composed of; sharding lives here, never in a model. Device side."""
