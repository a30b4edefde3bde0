"""What the operator's page shows and does: use of storage, checks, collection, the plan."""
