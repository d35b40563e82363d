"""Programs of other frameworks as tasks, and their calls on functions. Functions and the driver find these modules by name alone.

lightning              a LightningModule, with a LightningDataModule or loaders of its own
lightning_callbacks    callbacks as keys of a job, or for worker 0; callbacks: how those are called
lightning_trainer      what a LightningModule reads of its trainer, and what it logs
transformers           a model of `transformers` with its own loss, and a Trainer that takes TrainingArguments
transformers_callbacks, transformers_arguments, transformers_metrics   its callbacks; its arguments as keys of a job; its compute_metrics
joblib_backend         a back end of joblib over an executor; joblib_calls: what functions run of it
"""
