"""The toy of that contract."""

from dataclasses import dataclass

from rlcli.api.interface import ModelInterface, register_interface


@dataclass
class Toy(ModelInterface):
    """A toy."""

    factor: int = 1
    limit: int = 3
    seconds: float = 0.0

    def __post_init__(self):
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}")

    def divided(self):
        return 1 / self.factor


register_interface("toy-checked", Toy)
