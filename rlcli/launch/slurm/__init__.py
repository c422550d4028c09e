"""Runs as Slurm jobs: the script and its submission, execution inside the job,
and the state of jobs."""
