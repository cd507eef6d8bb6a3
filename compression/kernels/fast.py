"""All compiled kernels under one roof; a kernel without a compiled form is the numpy one."""

from compression.kernels.fast_int import axpy, int8_accumulate, int_decode, int_encode

__all__ = ["axpy", "int8_accumulate", "int_decode", "int_encode"]
