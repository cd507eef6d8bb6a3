"""All numpy kernels under one roof."""

from compression.kernels.ref_int import axpy, int8_accumulate, int_decode, int_encode

__all__ = ["axpy", "int8_accumulate", "int_decode", "int_encode"]
