"""The contracts: what an interface, a backend, a dataset and a dataflow graph are.

`from rlcli.api import model as model_api, data as data_api` is how components import them.
Importing this package itself costs nothing; `model` and `data` import torch.
"""
