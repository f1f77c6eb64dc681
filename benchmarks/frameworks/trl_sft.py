"""SFTTrainer of TRL."""

from common import arguments, done, gpt2, tokens
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

args = arguments()
words = {f"w{i}": i for i in range(128)}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
tokenizer.pad_token = tokenizer.eos_token = "w0"
settings = SFTConfig(
    output_dir=args.out,
    max_steps=args.steps,
    save_steps=args.save,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    max_length=16,
    report_to=[],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    seed=5,
    disable_tqdm=True,
)
model = GPT2LMHeadModel.from_pretrained(gpt2(f"{args.out}-model"))
rows = Dataset.from_list([{"input_ids": one["input_ids"]} for one in tokens()])
trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
trainer.train(resume_from_checkpoint=args.resume)
done(model, args.out)
