"""New components, recipes and projects from templates."""

from rlcli.scaffold.files import write
from rlcli.scaffold.plan import KINDS, Scaffold, plan, plan_project

__all__ = ["KINDS", "Scaffold", "plan", "plan_project", "write"]
