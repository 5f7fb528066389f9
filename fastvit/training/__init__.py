"""The trainer: ``python -m fastvit.training`` or ``fastvit-train``, alone or under torchrun.

Importing this package imports nothing heavy; scikit-learn, TensorBoard, tqdm and safetensors come with the
extra ``train`` (``pip install fastvit[train]``) and are imported when a run starts.
"""
