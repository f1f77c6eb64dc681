from datasets import load_dataset
from peft import LoraConfig
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser

if __name__ == "__main__":
    parser = TrlParser((SFTConfig, ModelConfig))
    training_args, model_args = parser.parse_args_and_config()
    dataset = load_dataset("trl-lib/Capybara", split="train")
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
