"""Deployment to a cluster: an image and one function. Only `cli` uses it.

The recipe of the image is first written to a folder for review. The user builds and pushes it.
"""
