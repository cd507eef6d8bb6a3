"""All compiled kernels under one roof."""

from compression.kernels.fast_bits import lm_decode, lm_encode, rotate, rotate_back, sign_decode, sign_encode
from compression.kernels.fast_ecsq import ecsq_quantise, log_histogram, lookup, rans_decode, rans_encode
from compression.kernels.fast_int import (
    all_finite,
    all_finite16,
    axpy,
    int8_accumulate,
    int_decode,
    int_encode,
)
from compression.kernels.fast_planes import join_planes, split_planes
from compression.kernels.fast_topk import (
    gaps_of,
    level_sums,
    rice_decode,
    rice_encode,
    rice_parameter,
    topk_select,
)

__all__ = [
    "all_finite",
    "all_finite16",
    "axpy",
    "ecsq_quantise",
    "gaps_of",
    "int8_accumulate",
    "int_decode",
    "int_encode",
    "join_planes",
    "level_sums",
    "lm_decode",
    "lm_encode",
    "log_histogram",
    "lookup",
    "rans_decode",
    "rans_encode",
    "rice_decode",
    "rice_encode",
    "rice_parameter",
    "rotate",
    "rotate_back",
    "sign_decode",
    "sign_encode",
    "split_planes",
    "topk_select",
]
