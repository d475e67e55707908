"""The rows of the catalog, one line an op; `autoprec.ops.catalog` says what the columns mean."""
