"""What is put into a cluster: an image and one function. Only `cli` uses it.

The image's recipe is written to a folder first, so that it can be read before it is built. Nothing is pushed from here.
"""
