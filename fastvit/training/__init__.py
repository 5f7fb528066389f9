"""The trainer: `fastvit-train` or `python -m fastvit.training`, in one process or on many ranks.

    command_line, config    options: flags, a TOML file, defaults
    launcher, distributed   variables of launchers, the process group, messages between ranks
    datasets, image_folder, loaders
                            images, augmentation, batches
    model, pretrained       the model, its norms, its initial weights
    nvidia_apex             NVIDIA apex's layers
    train_state             the state that a step changes
    loop                    one epoch of training, and how it ends on all ranks; evaluation
    checkpoint, resume, run_log
                            the files of a run, the lock, and the checkpoint that a run resumes
    run                     a run from start to end

scikit-learn, TensorBoard, tqdm and safetensors come with the extra `train` (`pip install '.[train]'`).
A run imports these packages when it starts; the import of `fastvit.training` does not.
"""
