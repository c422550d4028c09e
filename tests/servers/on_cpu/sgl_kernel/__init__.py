"""In place of SGLang's kernels, which exist for GPUs only: every name is there, and none can be
called but the hash that the seeded sampler needs."""

import torch

__version__ = "0"
__path__ = []
WORD = 0xFFFFFFFF


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"the kernel {name} does not exist on a CPU")

    return kernel


def rotated(number, bits):
    return ((number << bits) | (number >> (32 - bits))) & WORD


def product(number, factor):
    """The low 32 bits, without leaving those of int64 on the way."""
    return ((number & 0xFFFF) * factor + ((((number >> 16) * factor) & 0xFFFF) << 16)) & WORD


def mixed(state, word):
    word = product(rotated(product(word & WORD, 0xCC9E2D51), 15), 0x1B873593)
    return (product(rotated(state ^ word, 13), 5) + 0xE6546B64) & WORD


def murmur_hash32(seed, positions, columns):
    """MurmurHash3 of (seed, position, column), which are 64, 32 and 32 bits: [seeds, columns]."""
    seed = seed.view(torch.int64)
    state = mixed(torch.zeros_like(seed), seed & WORD)
    state = mixed(mixed(state, (seed >> 32) & WORD), positions.long())
    state = mixed(state[:, None], columns.long()[None]) ^ 16
    state = product(state ^ (state >> 16), 0x85EBCA6B)
    state = product(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


torch.library.define(
    "sgl_kernel::murmur_hash32_cpu", "(Tensor seed, Tensor positions, Tensor cols) -> Tensor"
)
torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU", murmur_hash32)
