"""Lightning's own DDP: what is saved, and gone on from, is this script's affair."""

from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from small import Net, Points

if __name__ == "__main__":
    seed_everything(1)
    saves = ModelCheckpoint("files", save_last=True, every_n_epochs=1)
    trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=4, logger=False, callbacks=[saves])
    last = "last" if Path("files/last.ckpt").exists() else None
    trainer.fit(Net(), datamodule=Points(), ckpt_path=last)
    print("began at", last, "ended at", trainer.global_step, flush=True)
