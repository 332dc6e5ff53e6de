"""Who may act for a job, and whose ranks may run: leases of shepherds, contact of owners with holders."""
