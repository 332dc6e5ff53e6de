"""How a shepherd and the owners agree on where a job runs."""
