"""Packages that functions of this machine have beside those of their client.

requirement_files       what a file of requirements names
local_environment       a virtual environment of it, made once
"""
