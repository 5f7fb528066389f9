"""`fastvit.convert` as the `Convert` of a framework: lightning, mmengine, torchtitan, transformers.

Each module imports its framework; this package imports none.
"""
