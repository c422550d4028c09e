"""The network interface that only processes of the same machine reach."""

import sys

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
