"""`fastvit.convert` in frameworks that have a socket for it: lightning, mmengine, torchtitan, transformers.

Each module imports its framework; this package imports none.
"""
