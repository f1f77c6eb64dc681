"""Trainer of transformers."""

from common import arguments, done, gpt2, tokens
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

args = arguments()
settings = TrainingArguments(
    output_dir=args.out,
    max_steps=args.steps,
    save_steps=args.save,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=4,
    report_to=[],
    use_cpu=True,
    seed=5,
    disable_tqdm=True,
)
model = GPT2LMHeadModel.from_pretrained(gpt2(f"{args.out}-model"))
trainer = Trainer(model, settings, train_dataset=tokens(), data_collator=default_data_collator)
trainer.train(resume_from_checkpoint=args.resume)
done(model, args.out)
