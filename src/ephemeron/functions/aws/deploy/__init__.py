"""Deployment to an AWS account: code, permissions, and one function of the wanted memory. Only `cli` uses it.

All documents are first written to a folder for review: a recipe of the image, the policies with minimum permissions, a
CloudFormation template. While no function runs, only the storage of an image (Amazon ECR) and of logs costs.
"""
