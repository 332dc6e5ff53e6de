"""The public HTTP API: routes, documents, streams, health, the status page, and the checks before any of them."""
