"""A function with each partition of a table of Parquet files, whose rows are the partitions of another one.

ranges        which rows of which file are a partition, from the files' metadata
source        partitions as items of a durable map
calls         the user's function, called with a partition in a function of a platform
folder        the files that are written: names, one schema, which of them count
mapping       `map_partitions`
"""
