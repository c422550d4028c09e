"""Lays out a resolved recipe: who computes what, where, and what it requires. Pure data,
no torch."""

from rlcli.topology.batch import BatchArithmetic
from rlcli.topology.placement import RolePlacement, Topology, WorkerGroup, plan_topology

__all__ = ["BatchArithmetic", "RolePlacement", "Topology", "WorkerGroup", "plan_topology"]
