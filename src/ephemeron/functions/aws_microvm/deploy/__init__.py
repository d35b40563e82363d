"""Deployment to an AWS account: a ZIP with a Dockerfile in S3, permissions, and an image of it. Only `cli` uses it.

All documents are first written to a folder for review. While no MicroVM runs, only the storage of the image's snapshots costs.
"""
