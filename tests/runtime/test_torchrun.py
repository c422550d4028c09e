"""What torchrun does otherwise than torch's own: the rest of the ranks is ended at once."""

import importlib
import signal
from unittest import mock

from torch.distributed.elastic.multiprocessing import api


def test_what_is_left_is_ended_by_sigkill(monkeypatch):
    """torch asks a private function for the signal; should it do so no more, this fails."""
    monkeypatch.setattr(api, "_get_default_signal", lambda: signal.SIGTERM)
    importlib.reload(importlib.import_module("rlcli.runtime.torchrun"))
    api.PContext.close(context := mock.Mock(_tail_logs=[]))
    context._close.assert_called_once_with(death_sig=signal.SIGKILL, timeout=mock.ANY)
