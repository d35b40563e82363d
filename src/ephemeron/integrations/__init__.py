"""Programs of other frameworks as tasks. Functions and the driver find these modules by name alone.

lightning             a LightningModule, with a LightningDataModule or loaders of its own
lightning_trainer     what a LightningModule reads of its trainer, and what it logs
"""
