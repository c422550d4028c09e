"""What other languages put around an answer: words that deny or weaken it,
and words that merely announce it.

Where a sentence names the answer in another language, or is written in another script, every word
of it must be one that announces: what we cannot read may deny.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def words(text: str) -> frozenset[str]:
    """A class of words."""
    return frozenset(text.split())


_DENYING = words(
    """
    nicht kein keine keinen keiner niemals nie vielleicht möglicherweise wahrscheinlich vermutlich
    etwa ungefähr rund
    beinahe oder weder falsch keineswegs keinesfalls mindestens höchstens wenn falls glaube schätze
    angeblich nein
    pas jamais aucun aucune peut-être probablement environ presque ou faux moins sauf sans ni peut
    quizás quizá tal talvez acaso probablemente aproximadamente casi alrededor o u sino falso menos
    salvo tampoco nunca
    jamás creo unos unas não provavelmente quase cerca nem errado jamais acho menos tranne
    non forse probabilmente oppure né nemmeno sbagliato meno credo
    niet geen nooit misschien waarschijnlijk ongeveer bijna fout onjuist hoogstens minstens
    inte ikke ikkje ej aldrig aldri kanske kanskje måske ungefär omkring cirka omtrent nästan eller
    fel feil forkert
    ei ehkä noin melkein väärin nie nigdy może chyba około prawie lub albo
    není ne nikdy možná asi přibližně nebo nu niciodată poate aproximativ sau greșit nem soha talán
    körülbelül vagy
    değil hayır belki yaklaşık veya yahut yanlış galiba sanırım
    bukan tidak tak mungkin barangkali kira-kira sekitar hampir atau salah không chẳng chưa khoảng
    hoặc
    """
)
"""Negations, hedges and "or" in Latin script, except those that are common English words."""

_NAMING = words(
    """
    antwort lösung ergebnis réponse résultat respuesta resultado resposta solução risposta soluzione
    risultato solución
    antwoord oplossing svar svaret lösningen vastaus odpowiedź odpověď răspunsul válasz cevap yanıt
    jawaban jawabannya
    ответ відповідь απάντηση جواب उत्तर
    """
)
"""Words for "answer"."""

_ANNOUNCING = words(
    """
    la le les el il lo die das der het de a o os as den det unsere meine notre ma nuestra mi nossa
    minha nostra mia
    est es é è ist sind is lautet beträgt är er on to jest je este adalah là c'est était
    finale final finales correcte correcta correta corretta richtige endgültige korrekte juiste
    slutliga rätta doğru
    egal égale igual uguale gleich à ao zu also daher somit folglich donc ainsi alors luego así
    portanto portanto logo
    quindi dunque allora dus så derfor więc por lo tanto tanto entonces finalement finalmente
    schließlich
    ответ ответом окончательный правильный является равен равна равно это итак следовательно значит
    таким образом
    отже відповідь απάντηση είναι الجواب الإجابة هو هي उत्तर है đáp án
    """
)
_MEASURES = words("км м см мм кг г л руб рублей часов минут евро долларов яблок человек метров")
IDEOGRAPHS = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_PIECES = words(
    """
    所以 因此 故 最终 最後 最后 正确 正確 的 答案 结果 結果 是 为 為 等于 等於 就是 我们得到 得到 得
    个 個 元 米 厘米 千克 公斤 克 小时 分钟 秒 人 岁 天 度 本 只 支 辆 次 平方 立方
    よって したがって ゆえに だから 最終的 な の 答え 正解 は です である だ となる
    となります になる になります 円 枚 回
    따라서 그러므로 최종 정답은 정답 답은 답 은 는 입니다 이다 개 원 명
    """
)
_PLAIN_IDEOGRAPHS = re.compile(f"(?:{'|'.join(sorted(_PIECES, key=len, reverse=True))})++")
NAMES_OF_ANSWERS = (*sorted(_NAMING), "答案", "答え", "正解", "정답")
_TAKING_BACK = re.compile("不对|不對|不是|错|錯|違|ない|아니")
_LATIN = 0x250
"""Characters below belong to the Latin script."""


def denies_elsewhere(word: str) -> bool:
    """Whether a lower-case word denies or weakens in a language other than English."""
    return word in _DENYING or (word.startswith("n'") and len(word) > 2)


def takes_back_elsewhere(text: str) -> bool:
    """Whether a text in a script without spaces denies."""
    return _TAKING_BACK.search(text) is not None


def is_elsewhere(words: Sequence[str]) -> bool:
    """Whether these words name an answer in a language other than English, or are in another
    script."""
    return any(word.lower() in _NAMING or ord(max(word)) >= _LATIN for word in words)


def announces(word: str) -> bool:
    """Whether a word of such a sentence only leads up to the answer or follows it."""
    lower = word.lower()
    if IDEOGRAPHS.fullmatch(word):
        return _PLAIN_IDEOGRAPHS.fullmatch(word) is not None
    return lower in _ANNOUNCING or lower in _NAMING or lower in _MEASURES
