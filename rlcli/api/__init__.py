"""The contracts: what an interface, a backend, a dataset and a dataflow graph are.

`from rlcli.api import model as model_api, data as data_api` is how components import them.
Importing this package itself costs nothing; `model` and `data` import torch.
"""

import sys

from rlcli import NOT_ON_WINDOWS

if sys.platform == "win32":
    raise ImportError(NOT_ON_WINDOWS)
