"""One model per group of a table, as durable maps: `fit_groups` and `predict_groups`.

table_data      tables as users have them, in parts
keys            values of the by-columns, as text
row_digests     when rows are equal
division        one pass over a table that brings the rows of each group together
grouping        what that has made: files of rows, and where each group is
objects         objects beside the table of results
group_rows      rows of a group, in a function
frames          rows as pandas, Polars, Arrow or NumPy
calls           how functions of the user are called with a group
source          groups as items of a durable map
models          models by group
fitting         `fit_groups`
predicting      `predict_groups`
joining         predictions beside the rows, in their order
"""
