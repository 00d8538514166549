"""What the commands share: standard output and the device (console.py), options (options.py), files that they write
(files.py), figures (figures.py), remote stores (stores.py), and the description of a device with the copiers that it
can use (machine.py).
"""
