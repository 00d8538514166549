"""Common parts of the commands: standard output and the device (console.py), options (options.py), files that they
write (files.py), figures (figures.py), remote stores (stores.py), the device and its copiers in words (machine.py).
"""
