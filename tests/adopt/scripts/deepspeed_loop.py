import argparse
import random

import deepspeed
import numpy as np
import torch
from transformers import AutoModelForCausalLM


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--ckpt_dir", default="ckpt")
    parser.add_argument("--steps", type=int, default=1000)
    return deepspeed.add_config_arguments(parser).parse_args()


class Tokens(torch.utils.data.Dataset):
    def __init__(self, path):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self):
        return len(self.tokens) // 512

    def __getitem__(self, i):
        return torch.from_numpy(self.tokens[i * 512 : (i + 1) * 512].astype(np.int64))


def main():
    args = get_args()
    deepspeed.init_distributed()
    random.seed(0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Tokens("train.bin")
    )
    _, client = engine.load_checkpoint(args.ckpt_dir)
    step = client["step"] if client else 0
    while step < args.steps:
        for batch in loader:
            batch = batch.to(engine.device)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            step += 1
            if step % 100 == 0:
                engine.save_checkpoint(args.ckpt_dir, client_state={"step": step})
                if engine.global_rank == 0:
                    print(step, loss.item())
            if step >= args.steps:
                break


if __name__ == "__main__":
    main()
