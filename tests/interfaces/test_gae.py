"""`InterfaceContract` has what holds for any call that takes the batch; the numbers of PPO are in test_ppo_actor.py."""

from rlcli.testing.interface import InterfaceContract


class TestContract(InterfaceContract):
    name = "gae"
    args = {"adaptive_kl_ctl": True, "adaptive_kl_horizon": 100.0}
