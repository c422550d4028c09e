"""Runs as jobs of Slurm: the script and its submission, what happens inside the job, and how jobs stand."""
