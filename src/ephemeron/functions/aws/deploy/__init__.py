"""What is put into an account: code, permissions, and one function at the wanted memory. Only `cli` uses it.

Everything is written to a folder first, so that it can be read before it is run: a recipe of the image, the policies
with the least that works, a CloudFormation template. Nothing here costs anything while no function runs, except the
storage of an image (Amazon ECR) and of logs.
"""
