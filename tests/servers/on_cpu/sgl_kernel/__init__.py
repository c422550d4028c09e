"""In place of SGLang's kernels, which exist for GPUs only: every name is there, and none can be called."""

__version__ = "0"
__path__ = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"the kernel {name} does not exist on a CPU")

    return kernel
