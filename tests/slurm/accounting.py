"""The emulated cluster with accounting: slurmdbd, and MariaDB for it,
as children of this process too.

The database is in the cluster's folder and answers only on a socket there, so an installation of
MariaDB on this machine is neither used nor disturbed.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .cluster import READY_WITHIN, Cluster, wait_for

SYSTEM_TABLES = "m*/m*_system_tables.sql"
"""MariaDB's own tables, under /usr/share; the folder's name depends on its version."""

CONFIGURATION = """\
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
SlurmUser=root
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
PidFile={home}/slurmdbd.pid
LogFile={home}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=accounts
"""


class AccountedCluster(Cluster):
    """A cluster whose jobs `sacct` knows."""

    KIND = "cluster with accounting"

    def __init__(self, home: Path, settings: Mapping[str, object]):
        self._data = home / "database"
        super().__init__(home, {**settings, "AccountingStorageType": "accounting_storage/slurmdbd"})

    def _configure(self) -> None:
        super()._configure()
        file = self._home / "slurmdbd.conf"
        file.touch(0o600)  # slurmdbd accepts no other mode
        file.write_text(CONFIGURATION.format(home=self._home, port=self._accounting_port))

    def _start_accounting(self) -> None:
        self._start_database()
        self.start_slurmdbd()  # the controller cannot begin without it

    def start_slurmdbd(self) -> None:
        self._start("slurmdbd", ["slurmdbd", "-D"], {"MYSQL_UNIX_PORT": str(self._data / "socket")})
        wait_for(self._answers, READY_WITHIN)

    def stop_slurmdbd(self) -> None:
        self._daemons["slurmdbd"].kill()
        self._daemons["slurmdbd"].wait(READY_WITHIN)

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self._data, ignore_errors=True)  # pytest keeps the folders of three sessions

    def _start_database(self) -> None:
        tables = sorted(Path("/usr/share").glob(SYSTEM_TABLES))
        assert tables, "there is no MariaDB server"
        self._data.mkdir(0o700)  # who can open the socket may do anything
        options = {
            "datadir": self._data,
            "socket": self._data / "socket",
            "pid-file": self._data / "pid",
            "user": "root",
            "innodb-log-file-size": "8M",
            "innodb-flush-log-at-trx-commit": 0,
        }
        command = ["mariadbd", "--no-defaults", "--skip-networking", "--skip-grant-tables"]
        command += [f"--{name}={value}" for name, value in options.items()]
        statements = b"create database mysql;\nuse mysql;\n" + tables[0].read_bytes()
        subprocess.run(
            [*command, "--bootstrap"],
            input=statements,
            capture_output=True,
            cwd=self._home,
            check=True,
        )
        self._start("mariadbd", command)
        wait_for((self._data / "socket").exists, READY_WITHIN)

    def _answers(self) -> bool:
        self._assert_alive()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._accounting_port)) == 0
