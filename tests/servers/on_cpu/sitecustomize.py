"""Supplies what SGLang lacks on a CPU when it is imported."""

import importlib.abc
import importlib.machinery
import re
import sys
from pathlib import Path


class DeclaresOperators(importlib.abc.MetaPathFinder):
    """torchvision comes as a CUDA build, whose operators are missing next to a CPU build of torch.
    SGLang only imports it: before that the operators are declared, without a body."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        spec = importlib.machinery.PathFinder.find_spec(name)
        source = Path(spec.origin).with_name("_meta_registrations.py").read_text()
        for operator in re.findall(r'register_fake\("(torchvision::\w+)"\)', source):
            torch.library.define(operator, "(Tensor a) -> Tensor")
        return spec


def allow_on_cpu(choices):
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def leave_products_alone(operations):
    operations.enable_batch_invariant_mode = lambda *args, **kwargs: None


def register_nothing(host_memory):
    """Experts of tokens are kept in host memory that CUDA would be told of."""
    host_memory._cuda_host_register = lambda *args, **kwargs: None


class AllowsSeeds(importlib.abc.MetaPathFinder):
    """Requests have seeds with enable_deterministic_inference alone, which is refused on a CPU for
    the sake of matrix products that it would replace by kernels of a GPU;
    the sampler itself is plain torch."""

    CHANGES = {
        "sglang.srt.arg_groups.choices": allow_on_cpu,
        "sglang.srt.batch_invariant_ops": leave_products_alone,
        "sglang.srt.mem_cache.pool_host.common": register_nothing,
    }

    def find_spec(self, name, path=None, target=None):
        if name not in self.CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path[:0] = [DeclaresOperators(), AllowsSeeds()]
