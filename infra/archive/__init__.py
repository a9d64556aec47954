"""The archive: records of a run's topics as Parquet in the object store, kept when the log has let them go.

log ──► windows of records ──► files, one an iteration or a window ──► a segment commits them
archive + log ──► `joined_bus`: one bus, on which nothing was ever removed
            └───► `streamrl sql`
"""
