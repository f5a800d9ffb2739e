"""User prompts, system prompts and follow-ups of our own, combined from templates and topics.

A share of the templates and of every topic list is held out: evaluation prompts use only those.
"""

import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

_HELD_OUT_EVERY = 8

TEMPLATES: tuple[str, ...] = (
    # Explanation
    "Explain {concept} to a {audience}.",
    "What is {concept}?",
    "Can you explain {concept} {size}?",
    "How does {concept} affect everyday life?",
    "Why is {concept} important?",
    "Give me an introduction to {concept}.",
    "I never understood {concept}. Where should I start?",
    "What are common misconceptions about {concept}?",
    "Give a real-world example of {concept}.",
    "Describe {concept} {size}.",
    "What is the difference between {pair}?",
    "Compare {pair} in a table.",
    "Which is better, and why: {pair}?",
    "Tell me about the history of {history}.",
    "Who invented {history}, and why did it matter?",
    "What would the world be like without {history}?",
    "Quiz me on {concept} with {count} questions and answers.",
    "Summarize what a {audience} should know about {concept}.",
    # How-to
    "How do I {task}?",
    "What is the best way to {task}?",
    "Give me a step-by-step guide to {task}.",
    "I want to {task}, but I have no experience. Any tips?",
    "List {count} mistakes people make when they {task}.",
    "How long does it take to {task}?",
    "What do I need to {task}?",
    "Explain how to {task} {size}.",
    "Make a checklist for someone who wants to {task}.",
    "How can I {task} on a small budget?",
    "How do I cook {food}?",
    "Give me a simple recipe for {food}.",
    "What goes well with {food}?",
    "Suggest a healthier version of {food}.",
    "Plan a dinner menu around {food}.",
    # Lists and facts
    "List {count} interesting facts about {place}.",
    "Give me {count} facts about the {animal}.",
    "Name {count} reasons to visit {place}.",
    "List {count} benefits of {hobby}.",
    "Give me {count} ideas for a gift for {gift}.",
    "What are the pros and cons of {issue}?",
    "List {count} skills that a {profession} needs.",
    "Suggest {count} names for a {animal}.",
    "Give me {count} questions to ask a {profession}.",
    "What are {count} things I should pack for a trip to {place}?",
    "Recommend {count} activities for a rainy day.",
    "Write {count} slogans for a {product}.",
    "What does a {profession} do all day?",
    "Where does the {animal} live, and what does it eat?",
    "What is {place} known for?",
    "What is the capital of the country around {place}, and what language is spoken there?",
    # Stories and poems
    "Write a short story about a {person} who {event}.",
    "Tell me a bedtime story about a {animal}.",
    "Write the opening paragraph of a novel about a {person}.",
    "A {person} {event}. What happens next?",
    "Write a poem about {place}.",
    "Write a {tone} poem about a {animal}.",
    "Write a haiku about {hobby}.",
    "Write a dialogue between a {person} and a {animal}.",
    "Invent a legend about {place}.",
    "Write a {tone} story in which a {person} {event}.",
    "Write a letter from a {person} to a {animal}.",
    "Make up a riddle about the {animal}.",
    "Describe a morning in {place} through the eyes of a {person}.",
    "Write a song about {quality}.",
    # Rewriting and summaries
    "Rewrite this sentence so that it sounds {tone}: {sentence}",
    "Correct the grammar: {sentence}",
    "Make this shorter: {sentence}",
    "Translate into {tongue}: {sentence}",
    "Summarize this {size}: {passage}",
    "What is the main idea of this text? {passage}",
    "Give this text a title: {passage}",
    "Continue this text: {passage}",
    "Rewrite the following text for a {audience}: {passage}",
    "Write {count} questions about this text: {passage}",
    "Turn this into bullet points: {passage}",
    # Email and work
    "Write a {tone} email to my {relation} {purpose}.",
    "Draft a short message to my {relation} {purpose}.",
    "Write a letter to a {relation} {purpose}.",
    "Write a product description for a {product}.",
    "Write a review of a {product}.",
    "Write a job advertisement for a {profession}.",
    "How do I become a {profession}?",
    "Prepare a short speech about {quality}.",
    "Write an introduction for an essay about {issue}.",
    "Write a social media post about {hobby}.",
    "Write an agenda for a meeting about {issue}.",
    # Advice and opinion
    "I feel {feeling}. What should I do?",
    "I'm {feeling}, can you cheer me up?",
    "How can I support a friend who is {feeling}?",
    "Is {hobby} a good hobby for a beginner?",
    "How do I get started with {hobby}?",
    "What do you think about {issue}?",
    "Give me arguments for and against {issue}.",
    "How can I develop more {quality}?",
    "Why does {quality} matter at work?",
    "Should I {task} this weekend or visit {place}?",
    "Plan a weekend in {place}.",
    "Plan a three-day trip to {place} for a {audience}.",
    "Make a weekly plan for someone who wants to get better at {hobby}.",
    "Give me some advice on how to {task}.",
    # Code
    "Write a {language} program that {code}.",
    "Write a function in {language} that {code}, and explain it.",
    "How would you write a program that {code}?",
    "Show me {language} code that {code}.",
    "What could go wrong in a program that {code}?",
    "Explain what a loop is in {language}.",
    "What is a variable in {language}?",
    "How do I handle errors in {language}?",
    "Write a test for a {language} function that {code}.",
    # Simple mathematics
    "What is {number} plus {number}?",
    "What is {number} times {small}?",
    "What is {small} percent of {number}?",
    "I bought {small} notebooks for {small} dollars each. How much did I spend?",
    "A train travels {number} kilometers in {small} hours. What is its average speed?",
    "Share {number} marbles equally among {small} children. How many does each get?",
    "Solve for x: {small}x + {small} = {number}",
    "Round {number}.{small} to the nearest ten.",
    # Roleplay and small talk
    "{opener}",
    "{opener}",
    "{opener} I feel {feeling}.",
    "{opener} I'd like to talk about {hobby}.",
    "Pretend you are a {character} and tell me about {place}.",
    "You are a {character}. I am a {person}. Start the conversation.",
    "Answer like a {character}: what is {concept}?",
    "Act as a {profession} and give me advice on {hobby}.",
    "Interview me for a job as a {profession}.",
    "Let's play twenty questions about a {animal}.",
    "Tell me a joke about a {profession}.",
    "What would a {character} say about {issue}?",
)

FOLLOW_UPS: tuple[str, ...] = (
    "Can you make that shorter?",
    "Can you give me an example?",
    "Why?",
    "Tell me more.",
    "Explain that in simpler words.",
    "What else should I know?",
    "Are you sure about that?",
    "Thanks! What would you do next?",
    "Now write it as a list.",
    "Rewrite that in a {tone} tone.",
    "How does this relate to {concept}?",
    "Can you add a conclusion?",
    "What are the disadvantages?",
    "Give me {count} more.",
    "Summarize your answer {size}.",
    "That's not what I meant. Try again.",
    "How much would that cost?",
    "Is there an alternative?",
    "Continue.",
    "What if I don't have much time?",
    "Which one do you recommend?",
    "Could you say that to a {audience}?",
    "Great, thank you!",
    "What is the first step?",
    "Who is it for?",
    "Translate the first sentence into {tongue}.",
)

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a friendly assistant who gives clear and short answers.",
    "Be concise and honest.",
    "You are a patient teacher.",
    "Answer in plain English.",
    "You are a creative writer.",
    "You are a careful assistant. If you are not sure, say so.",
    "You are an expert who explains things step by step.",
    "Respond politely and stay on topic.",
    "You are a cheerful chat companion.",
    "Give practical answers.",
    "You are a knowledgeable guide.",
    "You are a coding assistant.",
    "Write in short paragraphs.",
    "Be friendly.",
)

_POLITE = ("Please help me. ", "Hi! ", "Hey, ", "Quick question: ", "Hello. ", "I'm curious. ", "One more thing. ")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PromptBook:
    """One side of the split: the templates and topics that may be combined."""

    templates: tuple[str, ...]
    follow_ups: tuple[str, ...]
    system_prompts: tuple[str, ...]
    topics: dict[str, tuple[str, ...]]

    def user_prompt(self, rng: random.Random) -> str:
        """A first question, sometimes typed carelessly."""
        text = self._fill(rng.choice(self.templates), rng)
        if rng.random() < 0.1:
            text = rng.choice(_POLITE) + text
        if rng.random() < 0.1:
            text = text.lower()
        if rng.random() < 0.1:
            text = text.rstrip(".?!")
        return text

    def follow_up(self, rng: random.Random) -> str:
        """A later question about the answer so far."""
        return self._fill(rng.choice(self.follow_ups), rng)

    def system_prompt(self, rng: random.Random) -> str:
        return rng.choice(self.system_prompts)

    def _fill(self, template: str, rng: random.Random) -> str:
        def choose(match: re.Match[str]) -> str:
            slot = match[1]
            if slot == "number":
                return str(rng.randint(11, 999))
            if slot == "small":
                return str(rng.randint(2, 25))
            return rng.choice(self.topics[slot])

        return _SLOT.sub(choose, template)


def prompt_books() -> tuple[PromptBook, PromptBook]:
    """The books of training and of evaluation; they share no template, no follow-up and no topic."""
    training, held_out = [], []
    for is_held_out, book in ((False, training), (True, held_out)):
        book += [_part(x, is_held_out) for x in (TEMPLATES, FOLLOW_UPS, SYSTEM_PROMPTS)]
    slots = tomllib.loads((Path(__file__).parent / "topics.toml").read_text(encoding="utf-8"))
    topics = [{slot: _part(tuple(words), side) for slot, words in slots.items()} for side in (False, True)]
    return PromptBook(*training, topics[0]), PromptBook(*held_out, topics[1])


def _part(items: tuple[str, ...], is_held_out: bool) -> tuple[str, ...]:
    return tuple(x for i, x in enumerate(items) if (i % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) is is_held_out)
