"""The audit: a policy proven again before production, gate by gate, each with a threshold agreed before the run."""
