"""Gradients as 8-bit integers."""

from cdist.parallel.quantization import quantization_perchannel_hook, quantization_pertensor_hook

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]
