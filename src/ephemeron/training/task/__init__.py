"""Training programs: what is computed in a step, by which optimisers, and what an evaluation reports.

task            `Task`, the class that users derive from
job_task        a job file's model, loss and optimiser as a task
program         a task with its model, optimisers and schedulers, built on a function
optimizers      the forms in which a task may return optimisers and schedulers
schedulers      the job's learning-rate scheduler
losses          losses by name, and right answers of classification
evaluation      sums of metrics that merge exactly over functions
"""
