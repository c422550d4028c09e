"""torchrun, except that it ends what is left when a rank has died by SIGKILL and not by SIGTERM.

Ranks do not listen to SIGTERM (see `worker_main`); torchrun would wait half a minute for them, and the user with it.
"""

from __future__ import annotations

import signal

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.run import main

api._get_default_signal = lambda: signal.SIGKILL

if __name__ == "__main__":
    main()
