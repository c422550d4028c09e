"""New components, recipes and projects from templates: text, and the files that it goes into."""

from rlcli.scaffold.files import write
from rlcli.scaffold.plan import KINDS, Scaffold, plan, plan_project

__all__ = ["KINDS", "Scaffold", "plan", "plan_project", "write"]
