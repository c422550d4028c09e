"""Mirrors of a run in other tools: what it has written, in TensorBoard, W&B, MLflow or Trackio.

A mirror is a process of its own (`mirror_process`) that reads the files of the run (`run_files`)
and hands them to a `Tracker` (`contract`), of which each tool has one in a file of its name.
`rlcli.launch.mirrors` starts them with a run; `rlcli track` does the same work for a run that is
over.
"""
