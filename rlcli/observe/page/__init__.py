"""`rlcli report`: runs as one HTML page that works from a file, without a network."""
