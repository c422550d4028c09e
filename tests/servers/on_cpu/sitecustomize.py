"""torchvision comes as a CUDA build, whose operators are missing next to a CPU build of torch. SGLang only imports it:
before that the operators are declared, without a body."""

import importlib.abc
import importlib.machinery
import re
import sys
from pathlib import Path


class DeclaresOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        found = importlib.machinery.PathFinder.find_spec(name)
        source = Path(found.origin).with_name("_meta_registrations.py").read_text()
        for operator in re.findall(r'register_fake\("(torchvision::\w+)"\)', source):
            torch.library.define(operator, "(Tensor a) -> Tensor")
        return found


sys.meta_path.insert(0, DeclaresOperators())
